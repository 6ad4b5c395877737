"""The same shop under each idempotency middleware, configured as its documentation has it."""
