"""What the shells need of the machine: ports, certificates, standard streams, lines of text."""
