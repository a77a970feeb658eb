"""The words that the generators draw from, and names that nobody has read before."""

from random import Random
from string import ascii_lowercase

FIRST_NAMES = (
    "Ada", "Alan", "Alice", "Amir", "Anna", "Anton", "Aria", "Ben", "Bianca", "Bob", "Boris",
    "Carla", "Carlos", "Chen", "Clara", "Daniel", "David", "Diana", "Diego", "Elena", "Eli",
    "Ella", "Emma", "Eric", "Eva", "Farid", "Felix", "Fiona", "Frank", "Freya", "Grace", "Hana",
    "Hannah", "Hugo", "Ian", "Ida", "Igor", "Ines", "Ivan", "Jack", "Jana", "Jin", "John", "Jonas",
    "Julia", "Kai", "Karim", "Kate", "Lara", "Lea", "Leo", "Lily", "Lin", "Lisa", "Luca", "Lucy",
    "Maja", "Marco", "Maria", "Mark", "Mary", "Mei", "Mia", "Milo", "Mira", "Mona", "Nadia",
    "Nina", "Noah", "Nora", "Oleg", "Olga", "Oliver", "Omar", "Oscar", "Otto", "Paul", "Pedro",
    "Peter", "Petra", "Pia", "Priya", "Ravi", "Rita", "Robin", "Rosa", "Ruth", "Sam", "Samir",
    "Sara", "Sofia", "Sonja", "Stella", "Tara", "Theo", "Tim", "Tina", "Tom", "Uma", "Vera",
    "Victor", "Wei", "Yara", "Yusuf", "Zara", "Zoe",
)  # fmt: skip
LAST_NAMES = (
    "Adams", "Ahmed", "Baker", "Berg", "Brown", "Carter", "Costa", "Diaz", "Evans", "Fischer",
    "Garcia", "Green", "Hall", "Hansen", "Hill", "Holt", "Ito", "Jansen", "Johnson", "Jones",
    "Keller", "Khan", "Kim", "King", "Kowalski", "Larsen", "Lee", "Lopez", "Lovelace", "Marino",
    "Martin", "Meyer", "Miller", "Moreau", "Murphy", "Nguyen", "Novak", "Okafor", "Olsen", "Park",
    "Patel", "Petrov", "Rossi", "Sato", "Schmidt", "Silva", "Singh", "Smith", "Stone", "Tanaka",
    "Taylor", "Turing", "Turner", "Wagner", "Walker", "Weber", "White", "Wilson", "Wong", "Wright",
    "Young",
)  # fmt: skip
CITIES = (
    "Amsterdam", "Athens", "Austin", "Bangkok", "Barcelona", "Berlin", "Boston", "Brussels",
    "Budapest", "Cairo", "Chicago", "Copenhagen", "Dallas", "Delhi", "Denver", "Dublin",
    "Edinburgh", "Florence", "Geneva", "Hamburg", "Hanoi", "Helsinki", "Istanbul", "Jakarta",
    "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Lyon", "Madrid", "Manila", "Melbourne", "Miami",
    "Milan", "Montreal", "Moscow", "Mumbai", "Munich", "Nairobi", "Naples", "Osaka", "Oslo",
    "Ottawa", "Paris", "Porto", "Prague", "Rome", "Santiago", "Seattle", "Seoul", "Shanghai",
    "Singapore", "Stockholm", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip
JOBS = (
    "teacher", "doctor", "nurse", "baker", "engineer", "farmer", "pilot", "painter", "lawyer",
    "carpenter", "gardener", "programmer", "scientist", "writer", "singer", "chef", "plumber",
    "photographer", "librarian", "driver", "dentist", "architect", "journalist", "sailor",
    "electrician", "tailor", "waiter", "mechanic", "musician", "actor",
)  # fmt: skip
HOBBIES = (
    "chess", "painting", "swimming", "cooking", "reading", "running", "cycling", "gardening",
    "fishing", "dancing", "hiking", "football", "tennis", "photography", "sailing", "knitting",
    "singing", "climbing", "skating", "pottery",
)  # fmt: skip
ITEMS = (
    "book", "lamp", "chair", "table", "bicycle", "backpack", "keyboard", "phone", "jacket", "mug",
    "clock", "guitar", "camera", "umbrella", "notebook", "pencil", "blanket", "mirror", "laptop",
    "ticket", "candle", "pillow", "kettle", "carpet", "ladder", "hammer", "helmet", "basket",
    "bottle", "puzzle",
)  # fmt: skip
FOODS = (
    "apple", "pear", "orange", "banana", "lemon", "peach", "carrot", "cookie", "egg", "plum",
    "nut", "cake", "muffin", "melon", "onion", "tomato",
)  # fmt: skip
PLURALS = {"tomato": "tomatoes", "peach": "peaches", "box": "boxes"}
ANIMALS = (
    "fox", "rabbit", "bear", "mouse", "owl", "frog", "duck", "hedgehog", "squirrel", "cat", "dog",
    "turtle", "lion", "elephant", "goat", "penguin", "horse", "wolf", "bee", "snail", "otter",
    "sparrow", "donkey", "dragon",
)  # fmt: skip
PETS = ("dog", "cat", "rabbit", "parrot", "hamster", "horse", "turtle", "goldfish", "goat", "duck")
COLOURS = (
    "red", "blue", "green", "yellow", "black", "white", "brown", "grey", "orange", "purple", "pink",
    "silver",
)  # fmt: skip
WEEKDAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve",
)  # fmt: skip
_STARTS = (
    "B", "Br", "C", "Ch", "D", "Dr", "E", "F", "Fl", "G", "Gr", "H", "I", "J", "K", "Kr", "L", "M",
    "N", "O", "P", "Pr", "Qu", "R", "S", "Sh", "St", "T", "Th", "Tr", "U", "V", "W", "Y", "Z", "A",
)  # fmt: skip
_VOWELS = (
    "a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ie", "ou", "ee",
)  # fmt: skip
_ENDS = (
    "n", "r", "l", "s", "m", "th", "k", "nd", "x", "t", "v", "la", "ra", "na", "ri", "no", "do",
    "mi", "ne", "ven", "lor", "dan", "vik", "ston", "by", "ck",
)  # fmt: skip


def article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    return PLURALS.get(noun, f"{noun}s")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else plural(noun)}"


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def joined(items: list[str]) -> str:
    """Return the items as a list in words, like "one, two and three"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def invented_word(rng: Random) -> str:
    """Return a name made of syllables or, one time in five, of any letters.

    Nobody can know such names, so the model learns to copy them.
    """
    if rng.random() < 0.2:
        return "".join(rng.choices(ascii_lowercase, k=rng.randint(3, 8))).capitalize()
    word = rng.choice(_STARTS) + rng.choice(_VOWELS)
    for _ in range(rng.choice((0, 1, 1))):
        word += rng.choice("bdfgklmnprstvz") + rng.choice(_VOWELS)
    return word + rng.choice(_ENDS)


def first_name(rng: Random) -> str:
    return rng.choice(FIRST_NAMES) if rng.random() < 0.5 else invented_word(rng)


def last_name(rng: Random) -> str:
    return rng.choice(LAST_NAMES) if rng.random() < 0.4 else invented_word(rng)


def full_name(rng: Random) -> str:
    return f"{first_name(rng)} {last_name(rng)}"


def person_name(rng: Random) -> str:
    return rng.choice((first_name, full_name, full_name))(rng)


def city_name(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.6 else invented_word(rng)


def day_of_year(rng: Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}"


def clock_time(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"
