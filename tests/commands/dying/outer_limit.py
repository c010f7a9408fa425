"""Take 400 MiB, which the command's own limit allows, and a limit around it does not."""

pages = [bytes([number]) * 4 * 1024**2 for number in range(100)]  # TAKEN
print(len(pages))
