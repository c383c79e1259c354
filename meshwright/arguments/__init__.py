"""What command lines name, and options that several commands have."""
