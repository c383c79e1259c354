"""One pipeline stage on one rank: forward, backward, what is kept between them."""
