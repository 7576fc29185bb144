"""Files of others that are made to break the server that reads them."""
