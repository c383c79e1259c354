"""Training few parameters beside frozen ones: adapters, and bases that are kept in few bits."""
