"""Who is here: which hosts may work now, with how many slots."""
