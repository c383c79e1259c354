"""What a measurement is, as data and files: profiles of machines, and what a run leaves behind."""
