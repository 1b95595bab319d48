"""Makes the drawings of docs/pictures, from texts beside them and from tables of docs/."""
