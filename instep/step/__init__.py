"""One optimizer step as autograd tells of it: micro-batches, gradients that come, the end of backward."""
