"""The agent benchmark: sessions live and replayed, and what kills, broken calls and attacks do to them."""
