"""The machine's part of the shells: ports, certificates, standard streams, lines of text."""
