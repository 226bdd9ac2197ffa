"""The demo: a real agent works, is killed, and resumes for free."""
