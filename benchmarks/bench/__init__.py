"""What the scripts of this folder are made of; they find it beside them."""
