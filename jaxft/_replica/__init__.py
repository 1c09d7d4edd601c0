"""The replica's side of the step protocol: a pure core, and the session that carries it."""
