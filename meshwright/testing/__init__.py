"""What tests and benchmarks share that is made of the product's own parts."""
