"""Training DLite drafters: a corpus of the target's own answers, and the loop that learns from it."""
