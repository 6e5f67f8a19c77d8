"""Cut recordings of any length with their text into clips to train on."""
