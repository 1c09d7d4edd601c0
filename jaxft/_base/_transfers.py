"""What jaxft moves between host and devices is meant, also where a program forbids what it has not asked for."""

import jax

# For what is called in the program's own threads, under `jax.transfer_guard("disallow")`.
MAY_TRANSFER = jax.transfer_guard("allow")
