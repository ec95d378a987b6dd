"""What is on the medium, and who may change it when."""
