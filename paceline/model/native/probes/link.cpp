#include <string>
std::string probe(const char* text) { return text; }
