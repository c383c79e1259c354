"""`meshwright run`: starts ranks, shows and logs what they do."""
