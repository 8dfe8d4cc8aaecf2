"""The stores in which ranks meet, and how a rank finds the one that its launcher names."""
