"""Two plans side by side: how they are built, what they take, what they send."""
