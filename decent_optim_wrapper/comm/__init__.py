"""Exchange between ranks: communicators, small messages, and the store."""
