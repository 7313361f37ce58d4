"""What is measured; each suite drives any number of lanes that take turns request by request."""
