"""Other libraries' loops on instep; each file needs the library that it is named after."""
