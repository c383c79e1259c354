"""How we measure, one thing a file: ops, blocks, collectives, copies, memory. Knows no prices."""
