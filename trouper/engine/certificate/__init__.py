"""What `trouper certify` measures on the device, in processes of its own: tiny models of every
family, the user's model, its bare loop."""
