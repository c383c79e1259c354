"""What generated code calls to communicate, alone and beside products."""
