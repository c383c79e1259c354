"""What a traced training step is: tensors, ops, blocks, and what is known of operators."""
