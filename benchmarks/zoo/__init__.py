"""The model zoo: tiny cases of many architectures, and how each is tried."""
