"""The plan: its data, its file, its rules, its schedule, its prediction for people."""
