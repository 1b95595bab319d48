"""Test harness: drives a real node and real cores from outside, as a controller and its users do. Blocking code."""
