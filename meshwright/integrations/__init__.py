"""A job inside other people's training loops; each needs its own optional extra."""
