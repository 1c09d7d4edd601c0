"""jaxft's own transfers between host and devices, allowed also where a program forbids implicit transfers."""

import jax

# For calls in the program's own threads, under `jax.transfer_guard("disallow")`.
MAY_TRANSFER = jax.transfer_guard("allow")
