"""From plan and graph to the programs of one rank."""
