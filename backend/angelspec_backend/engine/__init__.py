"""The model engine: paged KV pool, packed ragged batches, attention and sampling on torch."""
