"""A job on several machines, a supervisor on each: where they meet, who leads, who is there."""
