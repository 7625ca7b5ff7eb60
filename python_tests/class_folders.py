"""Images in class folders, as a user brings them."""

from PIL import Image


def make_class_folders(root, levels, counts):
    """Noise images of 24 x 24 pixels as root/part/class/number.png; returns root.

    Args:
        levels: from class to the grey value that its images lie a little above, which tells them apart.
        counts: from part, such as "train", to the number of images in each of its classes.
    """
    for part, count in counts.items():
        for name, level in levels.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = Image.effect_noise((24, 24), 20).point(lambda value, level=level: value // 4 + level)
                image.convert("RGB").save(folder / f"{number}.png")
    return root
