"""The order in which a sharding takes its devices: a program takes its inputs on the same ones in one order."""

from jax.sharding import Mesh, NamedSharding, Sharding


def device_order(sharding: Sharding) -> tuple[int, ...]:
    """The numbers of the devices, in the order of the mesh where there is one."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(device.id for device in sharding.mesh.devices.flat)
    return tuple(sorted(device.id for device in sharding.device_set))
