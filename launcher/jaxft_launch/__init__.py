"""The command `jaxft`: starts groups, keeps them alive, makes faults, and shows what a coordinator knows."""
