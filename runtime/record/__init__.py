"""What a rank notes of its steps: times, memory, reports."""
