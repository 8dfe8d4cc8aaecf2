"""How values travel: buckets, their memory, codes, references, and what arrives mixed in."""
