"""What is decided and reported: requests, plans, imports, commands, and the roles in a pod."""
