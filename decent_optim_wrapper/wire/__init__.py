"""How values are sent and mixed: buckets, their memory, codes, references."""
