"""The processes of a job: how they meet, and what happens when one fails."""
