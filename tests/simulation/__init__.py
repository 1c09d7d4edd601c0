"""The protocol under attack: the real cores of coordinator and groups, a virtual clock, one seed. See `world`."""
