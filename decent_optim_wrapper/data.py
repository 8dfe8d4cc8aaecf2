"""Data for ranks that are lost and come back."""

from decent_optim_wrapper.elastic.data.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
