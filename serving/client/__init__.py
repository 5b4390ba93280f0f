"""The client of the serving servers, and the way from a key to a replica."""
