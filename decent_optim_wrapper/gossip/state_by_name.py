"""The state of an outer optimizer by the names of the parameters, not by their places.

A pipeline stage has other parameters at the same places than the next one, and other layouts of the
replica have others again. The names are those of the model everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def by_name(state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Rearrange what `Outer.state_dict` has returned.

    Args:
        state: by place.
        names: of the parameters, in their order.
    """
    optimizer = state["optimizer"]
    settings = {
        place: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer["param_groups"]
        for place in group["params"]
    }
    return {
        name: {
            "anchor": state["anchors"][place],
            "started": state["started"][place],
            "stepped": state["stepped"][place],
            "state": optimizer["state"].get(place, {}),
            "settings": settings[place],
        }
        for place, name in enumerate(names)
    }


def by_place(
    state: dict[str, Any], names: Sequence[str], groups: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Rearrange what `by_name` has returned for `Outer.load_state_dict`.

    Args:
        state: by name; it may hold more parameters than are here.
        names: of the parameters, in their order.
        groups: into which the outer optimizer puts them here, by place. Each takes the settings of
            its first parameter; one without parameters, as a stage may have, keeps its own.
    """
    rows = [state[name] for name in names]
    return {
        "anchors": [row["anchor"] for row in rows],
        "started": [row["started"] for row in rows],
        "stepped": [row["stepped"] for row in rows],
        "optimizer": {
            "state": {place: row["state"] for place, row in enumerate(rows)},
            "param_groups": [
                {**group, **rows[group["params"][0]]["settings"]} if group["params"] else group
                for group in groups
            ],
        },
    }
