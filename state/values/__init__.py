"""Values as a state keeps them: types, bytes, and what the user's objects hold."""
