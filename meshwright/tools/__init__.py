"""What people do with plans: report, explain, compare, race, dry-run, export."""
