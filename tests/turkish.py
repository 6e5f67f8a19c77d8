"""A new language for the tests of tokenizers and vocabularies."""

# Real Turkish: six letters that English and French do not have, and words that share pieces with both.
TURKISH = """Günaydın, bugün hava çok güzel ve güneşli.
Lütfen bekleyin, şimdi sizi ilgili kişiye bağlıyoruz.
Şifrenizi girin ve ardından kare tuşuna basın.
Aradığınız kişiye şu anda ulaşılamıyor, lütfen daha sonra tekrar deneyin.
Mesajınızı bip sesinden sonra bırakabilirsiniz.
Yeni bir mesajınız var, dinlemek için bire basın.
Konferansa katılan kişi sayısı yediden fazla olamaz.
İstanbul ve Ağrı arasında uçuşlar öğleden sonra başlıyor.
Görüşmeyi sonlandırmak için sıfıra basın.
Bu görüşme kalite amacıyla kayıt altına alınıyor."""
