"""What a prediction says to people, and how it compares with a run."""
